"""``python -m megatron_paci compare``: the same training under several schedules, one report.

A plan (plan.py) is a list of runs that differ in the schedule alone. They are started one after
another (launch.py, runs.py) and leave records and traces; figures (records.py, traces.py,
predict.py, virtual.py) are made of those, and of the figures a verdict (verdict.py), pictures
(pictures.py) and a report (report.py, document.py). With ``--short`` (short.py) the verdict is
whether the loss curves part (gap.py, short_verdict.py). Nothing here imports torch or Megatron,
except check.py and virtual.py, in processes of their own.
"""
