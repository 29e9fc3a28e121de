"""What all ranks have compiled, folded into one bounded book, and the document that everything shown of torch.compile is made from. Pure."""
