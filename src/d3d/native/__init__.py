"""A decoder's whole forward pass in C, for CPUs.

The sources in `csrc` are compiled on first use and loaded by ctypes. Arithmetic is float32 on the
weights as stored, and batch-invariant: a row's bits depend neither on the other rows of a pass, nor
on the number of threads, nor on how a prompt is cut into passes."""
