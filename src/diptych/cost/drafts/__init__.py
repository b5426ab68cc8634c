"""What drafts are worth: chances (`acceptance`), depths by price (`depths`), the engine's prices (`prices`, without a profile
`measured`), and which of the executor's drafters is asked (`drafter_choice`), out of what purse (`drafter_trials`).
"""
