"""Times pipeline schedules from the orders that the engine runs, without running anything.

``python -m megatron_paci simulate`` is the command line. Importing this package needs neither
PyTorch nor Megatron. In it imports point one way: ``orders`` <- ``timing``, ``schedules`` <-
``figures`` <- ``advice`` <- the text, the picture and the command.
"""
