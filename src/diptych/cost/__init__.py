"""What a step costs, by arithmetic: FLOPs, bytes, the roofline, the calibrated model and the planner.

Standard library and `ground` only: importing this package loads no tensor library.
"""
