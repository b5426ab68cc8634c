"""Constants from published measurements, and how wrong they are.

Of single steps: `rows` (what was published), `forms` (how each software is modelled), `fit`, `held_out` (what leaving the rows
costs), `accuracy`. Of services: `services` (what was published), `recipes` (how their schedulers were told to plan),
`service_forms`; the scheduler under their loads is `diptych.sim.truth`.
"""
