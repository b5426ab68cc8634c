"""Open Responses: another shape around a turn, with a store behind it."""
