"""Device kernels, one folder an operation: ``api`` (the signature), ``reference`` (the readable twin), backends.

``targets`` names the chips and what is known of each; ``layout`` says how a paged cache lies in memory.  A kernel takes
its target and its block sizes as arguments and never asks which devices this machine has: that is what lets a host
without an accelerator compile for one.
"""
