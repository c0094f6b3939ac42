"""Pages: the buffer pool, the B+tree in it, and the file that holds them."""
