"""Floor 3: measures the engine: benchmarks, load, calibration and the experiments on the two phases."""
