"""The two classes that users hold: `XLAShardedTensor` and `XLATensor`."""
