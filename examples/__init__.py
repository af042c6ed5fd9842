"""Examples, to run as scripts.

A package, so that no other ``examples`` on the path, such as that of a Megatron-LM checkout, takes
its place where one of them is imported.
"""
