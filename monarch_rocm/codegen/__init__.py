"""`monarch-rocm codegen`: what the shipped kernels become on CDNA GPUs, with none at hand.

Triton's wheel holds AMD's code generator. `layers` says which launches there are, `compiling` turns
them into machine code, `assembly` reads that, `gate` judges it by `stored` budgets and exceptions, and
`command` prints. Nothing is run: all numbers are read from the code, but for those that `stored`
keeps from an interpreter of that code.
"""
