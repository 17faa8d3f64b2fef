"""The audit of losslessness: plain against speculative, and samples against exact probabilities.

Sits above the engine and runs it as users do. It judges; it changes nothing. What it cannot see is
a fault that plain and speculative decoding share.
"""
