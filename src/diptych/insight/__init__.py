"""What numbers say to a person: causes in a server's metrics, costs of a prompt's parts. Pure arithmetic, no server."""
