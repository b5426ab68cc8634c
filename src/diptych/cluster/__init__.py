"""Several engines behind one door: pools of workers that read prompts and write answers, and hand keys and values over.

`worker` is one engine of a pool, `core` stands in `EngineCore`'s place before them, `local` joins them in one process, and
`rays`, the only module that imports ray, as actors on one machine or several.
"""
