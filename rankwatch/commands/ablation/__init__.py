"""`rankwatch ablate`: the same job once per backend of torch.compile. ladder, records, compare, judge, bisect, advice and text decide; runs does."""
