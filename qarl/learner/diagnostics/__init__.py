"""What watches a batch being learned, a file each; `observers` has the list."""
