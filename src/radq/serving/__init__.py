"""An HTTP server with OpenAI's interface, in which clients steer each request."""
