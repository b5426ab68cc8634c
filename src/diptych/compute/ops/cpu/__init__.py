"""The cpu backend: a family's forward recorded into a native program over the kernels in `csrc`."""
