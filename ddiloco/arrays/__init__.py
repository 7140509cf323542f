"""Host arrays and blocks of arrays: what moves and stores them shares."""
