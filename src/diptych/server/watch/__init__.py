"""What the server tells of itself: counts, the live page's feed, records of requests, a journal for the simulator."""
