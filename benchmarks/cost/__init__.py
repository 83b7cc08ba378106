"""What pruning costs and saves: overhead, efficiency, capacity, selection, and a soak test."""
