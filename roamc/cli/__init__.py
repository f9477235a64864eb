"""The command line: ``commands`` has its commands, ``zoo`` the built-in models, ``demo`` the demonstration."""
