"""Trains all stages of a pipeline in one process, to measure how well a schedule learns.

The stages are Megatron models and optimizers driven by the same engine, window and tied embedding
as in a distributed job; only messages and the collectives of drains stay within the process. So a
run is bitwise the same as a distributed one, on one core, whatever the number of stages.
docs/convergence.py runs the experiments.
"""
