"""What a step costs, by arithmetic: FLOPs, bytes, the roofline, the calibrated model and the planner.

Standard library and floor 0 only: importing this package loads no tensor library. Where what stands, from the ground up:

* what there is to count: `components` (a step's FLOPs and bytes), `parameters`, `adapters`, `exchange` (what ranks tell
  each other);
* on what: `tables` (names), `layout` (devices beyond tensor parallel), `memory` (what fits), `setup` (one way to run one
  model, which all answers are about);
* how long: `roofline` (the bound), `calibrated` (the prediction) by the constants of `calibration`, which are those of
  published software (`stacks`) or this machine's (`profile`); `reach` (how much wider an interval is far from the rows);
  `step_time` (learned from an engine's own steps, where nothing else is known);
* answers: `planner` (both phases of a setup), `advice` (what would change), `sizing` (the cheapest setup), `places` (sequences
  at one time), `shared_machine` (whether workers pay on it);
* `drafts`: how many guesses at coming tokens are worth their rows;
* `fitting`: constants from published rows, and how wrong they are: for `diptych plan accuracy` alone.
"""
