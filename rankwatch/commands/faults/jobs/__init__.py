"""Training scripts with one fault each, `SCRIPT NAME PLANTED_FILE` under torchrun. Each stands alone: it is copied into the run directory."""
