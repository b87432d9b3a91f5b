"""Leaf package: kernels, their torch references and the capability table. Importing it needs neither a GPU nor cutlass."""
