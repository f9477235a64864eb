"""What roamc knows of operators: the table ``ops``, how each is lowered, and the operators and kernels of its own."""
