"""Several engines behind one door: pools of workers that read prompts and write answers, and hand keys and values over.

`worker` is one engine of a pool, `core` stands in `EngineCore`'s place before them, and `rays`, the only module that imports
ray, joins them as actors on one machine or several.
"""
