"""What device families share that PyTorch drives in the way of torch.cuda: streams, captures, pools, shared memory.

A family brings a small record of names and calls (:class:`halma.backends.torch_device.family.Family`) and what is
truly its own: its driver's calls, how a template becomes an executable, how a pool is given back.
"""
