"""Model families: one readable file each, written once against the op vocabulary of `compute.ops.contract`."""
