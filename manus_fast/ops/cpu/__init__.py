"""CPU implementations: chunked torch where a matrix product dominates, the compiled extension elsewhere."""
