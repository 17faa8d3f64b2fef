"""The road to bigger engines: the same pair, served by vLLM, SGLang, llama.cpp or Ray Serve.

plan      what to serve, in this package's words
pair      looks at target and draft, refuses a pair that does not fit
vllm, sglang, llama_server, ray    the plan in one engine's words; pure
launch    the only file that starts processes, waits and stops them
"""
