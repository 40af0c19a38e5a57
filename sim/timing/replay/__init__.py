"""From traces to times: programs, the engine that runs them, and what can be read off."""
