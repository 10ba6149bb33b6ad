"""Experiments of many runs: studies, and fine-tuning suites.

`samestep study` compares arms over seeds, `samestep finetune-suite` fine-tunes a checkpoint on
tasks. Both list their work first, run it as samestep commands of its own (`execution`), and keep
what is finished, so that the same command continues after a stop.
"""
