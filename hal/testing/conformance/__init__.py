"""The suite that a backend must pass: one test and one control arm, at least, for every rule of capture and memory.

``halma conformance --backend NAME`` runs it. It uses the public contract alone and no other backend's internals.
Modules called ``test_cpu_*`` look at what only the CPU backend can show, and run for it alone.
"""
