"""`samestep plan`: what a run will take of each device's memory and send between devices, before it
is started.
"""
