"""Floor 2: joins control (which integers to compute) and compute (how), and turns tokens into text and accounts."""
