"""The torch backend on a GPU: kernels in Triton whose bits do not depend on the batch, and steps recorded and replayed.

A row's result is made of the same operations in the same order whatever stands beside it: products add along K in steps of
one matrix instruction, into one sum; attention adds tile by tile from multiples of TILE, into a sum for every SPLIT positions,
and those in their order. Tiles of few rows (`mma.sync`) and of many (`wgmma`) give the same bits on Hopper (LAB.md), and no
kernel lets the compiler fuse a product and a sum, which it would do here and not there.
"""
