"""The what-if model: replays a trace in time under a cost file. It judges nothing."""
