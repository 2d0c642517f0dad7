"""Client and server side of vLLM's servers.

On the run's side:
- `replica`: a server as a replica, built on `client`'s HTTP.
- `answers`: writes requests, reads completions and checks them.
- `start`: starts replicas on this machine.

Inside a server:
- `worker`: loads versions from files.
- `receive`: receives those files over HTTP.
- `access`: checks the API key.
"""
