"""Experiments of many runs: studies, and fine-tuning suites.

`samestep study` compares arms over seeds, `samestep finetune-suite` fine-tunes a checkpoint on
tasks. Both list their work first, run it as separate samestep commands (`execution`), and keep
finished work, so that the same command continues after a stop.
"""
