"""CPU routes that compute in one launch with numpy and Python what the references do in many calls of ATen.

A decode step of a small model is bound by the number of calls: one of ATen costs 2 to 6 us on small tensors,
one of numpy about 1 us. A launch is one opaque node of a graph, and it may look at values (which experts were
chosen, whether a block is complete), since on this device memory and host are the same.
"""
