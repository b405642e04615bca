"""What all tests share."""

import signal

# A shell that starts the tests in its background has SIGINT ignored, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
