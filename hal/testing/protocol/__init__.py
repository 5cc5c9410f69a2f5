"""An explicit-state model of the collective slot-and-epoch protocol (rule C14); no code that runs on a device uses it.

What is assumed of the machine:

* a *location* is one word of a receive buffer. It has one sender (a rank) and one reader (another rank); the reader
  may also clear it;
* stores of one sender to one location become visible in the order in which they were made; between two locations
  there is no order at all, and a store may stay invisible for as long as it likes;
* a word is read whole, data and flag together, and each word by itself: what a block has read of its other words
  says nothing about this one;
* a clear becomes visible somewhere between its issue and the fence that follows it, or the end of its kernel;
* a kernel begins after the kernel before it ended, or earlier under dependent launch: then its grid-dependency wait
  returns when the kernel *just before* it has ended, which says nothing about those further back.

``model`` turns a protocol and a list of calls into one small program a block; ``system`` is all that those programs
can do, action by action, or reduced; ``explorer`` searches it; ``replay`` runs one trace again on real words;
``proved`` and ``refuted`` have ours and the broken protocols as data (``cases`` says what a variant is, ``variants``
finds one by name); ``verdicts`` searches one. ``python -m halma.hal.testing.protocol`` prints the table, and
``docs/protocol.md`` says what it means.
"""
