"""Host arrays and blocks of arrays, as transfers and storage share them."""
