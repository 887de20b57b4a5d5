"""Run claims about inference again: predicted first, measured on this machine, and judged by limits that are fixed."""

from ridgeline.lab.experiment import Experiment, Setup
from ridgeline.lab.judgement import Judgement, Verdict
from ridgeline.lab.registry import NAMES, find
from ridgeline.lab.run import Record, run, run_all

__all__ = ["NAMES", "Experiment", "Judgement", "Record", "Setup", "Verdict", "find", "run", "run_all"]
