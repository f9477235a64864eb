"""What every test may rely on."""

import signal

# A run that was started in the background (nohup, some CI runners) inherits an ignored Ctrl-C, which tests press.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
