"""Token-budget batches, planned per update and not per device (DESIGN section 6).

Which pairs an update holds follows from their lengths, the size of an update, the seed and the epoch alone. Devices
and gradient accumulation only split an update into micro-batches: eight GPUs make the updates that a laptop makes.
"""

from collections.abc import Sequence

import numpy as np
import torch

from .errors import InputError


# Target tokens of a grain: pairs of one length that stay together. Small enough that a 25,000-token update mixes about
# twelve lengths, large enough for full matrix products.
GRAIN_TOKENS = 2048


class UpdatePlan:
    """All updates of all epochs for `lengths`, an (N, 2) array of source and target token counts with `</s>`.

    An epoch is cut into `updates_per_epoch` updates of about `tokens_per_update` target tokens and holds every pair
    once. In a micro-batch, rows * width is at most `max_tokens_per_device` on either side, and padding at most
    `launch_tokens`: the tokens a device computes in the time that one more micro-batch would cost. The default suits a
    CPU; a GPU, where launching kernels takes longest, does better with several thousand.

    Holds 8 to 16 bytes a pair. Raises InputError when there is no pair or one does not fit a device.
    """

    def __init__(self, lengths, tokens_per_update, max_tokens_per_device, seed=0, launch_tokens=128):
        lengths = np.asarray(lengths)
        _check(lengths, tokens_per_update, max_tokens_per_device)
        self.lengths = lengths.astype(np.uint16 if lengths.max() < 2**16 else np.uint32)
        self.max_tokens_per_device, self.launch_tokens, self.seed = max_tokens_per_device, launch_tokens, seed
        updates = round(int(lengths[:, 1].sum(dtype=np.int64)) / tokens_per_update)
        self.updates_per_epoch = min(max(updates, 1), len(lengths))
        # Neither the devices nor their memory may enter here, or they would decide which pairs share an update.
        wanted = max(1, round(tokens_per_update / GRAIN_TOKENS))
        self._grains_per_update = min(wanted, len(lengths) // self.updates_per_epoch)
        self._epoch = None

    def update(self, n: int, num_devices: int = 1) -> list[list[np.ndarray]]:
        """Return the micro-batches of update `n` (from 0, over all epochs): one list of pair indices for each device.

        Every device gets equally many; an empty array is a filler for one that has nothing left to do.
        """
        if n < 0 or num_devices < 1:
            raise ValueError(f"update {n} on {num_devices} devices: expected n >= 0 and num_devices >= 1")
        pairs = self._pairs(n)
        cuts = _split(self.lengths[pairs], num_devices, self.max_tokens_per_device, self.launch_tokens)
        return _level([[pairs[start:stop] for start, stop in share] for share in cuts])

    def regroup(self, lengths: np.ndarray) -> list[np.ndarray]:
        """Return micro-batches, as places in `lengths` (N, 2), of pairs that BPE-dropout made longer than planned."""
        longest, difference = lengths.max(axis=1), lengths[:, 0] - lengths[:, 1]
        order = np.lexsort((np.where(longest & 1, difference, -difference), longest))
        limit = max(self.max_tokens_per_device, longest.max())
        (cuts,), _ = _deal_out(lengths[order], 1, np.inf, limit, self.launch_tokens)
        return [order[start:stop] for start, stop in cuts]

    def padding(self, epoch: int = 0, num_devices: int = 1) -> float:
        """Return which share of the tokens computed in an epoch, source and target together, is padding."""
        padded = 0
        for n in range(epoch * self.updates_per_epoch, (epoch + 1) * self.updates_per_epoch):
            batches = [self.lengths[rows] for share in self.update(n, num_devices) for rows in share if len(rows)]
            padded += sum(len(batch) * int(batch.max(axis=0).sum()) for batch in batches)
        return 1 - int(self.lengths.sum(dtype=np.int64)) / padded

    def _pairs(self, n):
        """Return the pairs of update `n`, those of similar length side by side."""
        epoch, step = divmod(n, self.updates_per_epoch)
        if epoch != self._epoch:
            self._order, self._bounds, self._deal = self._plan(epoch)
            self._epoch = epoch
        grains = np.sort(self._deal[step])
        return np.concatenate([self._order[self._bounds[i] : self._bounds[i + 1]] for i in grains]).astype(np.int64)

    def _plan(self, epoch):
        """Order the pairs by length, cut the order into grains and deal these at random to the updates."""
        random = np.random.Generator(np.random.PCG64((self.seed, epoch)))
        order = np.arange(len(self.lengths), dtype=np.int32)
        random.shuffle(order)
        # Rank by a mean of the two lengths, weighted anew every epoch, then by their difference, blurred by a token:
        # no two epochs put the same pairs together. The difference rises at odd ranks and falls at even ones, so that
        # it does not jump within a grain.
        weight = random.random(dtype=np.float32)
        # NumPy sorts 16 bits by radix, several times as fast.
        key = np.int16 if self.lengths.max() < 2**14 else np.int64
        source, target = (self.lengths[order, side].astype(key) for side in (0, 1))
        rank = np.rint(weight * source + (1 - weight) * target).astype(key)
        difference = source - target + random.integers(0, 2, len(order), dtype=key)
        order = order[np.lexsort((np.where(rank & 1, difference, -difference), rank))]
        bounds = _equal_cuts(self.lengths[order, 1], self.updates_per_epoch * self._grains_per_update)
        deal = random.permutation(np.arange(len(bounds) - 1, dtype=np.int32)).reshape(-1, self._grains_per_update)
        return order, bounds, deal


def _check(lengths, tokens_per_update, max_tokens_per_device):
    if not len(lengths):
        raise InputError("no training pairs are left: check --train_file and the filters")
    if lengths.ndim != 2 or lengths.shape[1] != 2:
        raise ValueError(f"lengths must have shape (pairs, 2), not {lengths.shape}")
    if tokens_per_update < 1:
        raise ValueError(f"tokens_per_update must be at least 1, not {tokens_per_update}")
    if lengths.min() < 1:
        raise ValueError(f"lengths count </s> and are at least 1, not {lengths.min()}")
    too_long = int((lengths > max_tokens_per_device).any(axis=1).sum())
    if too_long:
        raise InputError(
            f"{too_long} of {len(lengths)} training pairs are longer than --max_tokens_per_device "
            f"{max_tokens_per_device}: raise it to {lengths.max()} or leave these pairs out"
        )


def _equal_cuts(tokens, count):
    """Return `count + 1` bounds that cut `tokens` into non-empty runs of about equal sums."""
    total = np.cumsum(tokens, dtype=np.int64)
    inner = np.arange(1, count)
    cuts = np.searchsorted(total, total[-1] / count * inner)
    # At least one item each: from the left no bound before its number, and likewise from the right.
    cuts = np.maximum.accumulate(cuts - inner) + inner
    cuts = np.clip(cuts, inner, len(tokens) - count + inner)
    return np.concatenate([[0], cuts, [len(tokens)]]).astype(np.int32)


def _split(lengths, num_devices, max_tokens, launch_tokens):
    """Return a list of (start, stop) for each device so that the slowest has as little to do as possible."""
    shares, slowest = _deal_out(lengths, num_devices, np.inf, max_tokens, launch_tokens)
    # Bisection for the lowest ceiling on a share, to 1 %; nobody can do less than the mean without padding.
    lowest = int(lengths.sum(dtype=np.int64)) // num_devices
    while num_devices > 1 and slowest - lowest > lowest // 100:
        ceiling = (lowest + slowest) // 2
        better = _deal_out(lengths, num_devices, ceiling, max_tokens, launch_tokens)
        if better:
            shares, slowest = better[0], min(ceiling, better[1])
        else:
            lowest = ceiling + 1
    return shares


def _deal_out(lengths, num_devices, ceiling, max_tokens, launch_tokens):
    """Cut the pairs in order, one device after the other, each up to `ceiling` padded tokens.

    Returns the shares and the largest cost among them, or None if pairs are left over. A device gets one pair even
    above the ceiling, and leaves one for each device that follows.
    """
    shares, slowest, start = [], 0, 0
    for device in range(num_devices):
        end = min(len(lengths), max(start + 1, len(lengths) - (num_devices - 1 - device)))
        share, cost = [], 0
        while start < end:
            rows = _fill(lengths[start:end], ceiling - cost, max_tokens, launch_tokens)
            if not rows and share:
                break
            stop = start + max(rows, 1)
            cost += (stop - start) * int(lengths[start:stop].max(axis=0).sum())
            share.append((start, stop))
            start = stop
        shares.append(share)
        slowest = max(slowest, cost)
    return (shares, slowest) if start == len(lengths) else None


def _fill(lengths, ceiling, max_tokens, launch_tokens):
    """Return how many of the first pairs make one micro-batch, possibly none."""
    lengths = lengths[: max_tokens // int(lengths[0].max())].astype(np.int64)
    rows = np.arange(1, len(lengths) + 1)
    widths = np.maximum.accumulate(lengths)
    padded = rows * widths.sum(axis=1)
    padding = padded - np.cumsum(lengths.sum(axis=1))
    fits = (rows * widths.max(axis=1) <= max_tokens) & (padding <= launch_tokens) & (padded <= ceiling)
    return len(fits) if fits.all() else int(fits.argmin())


def _level(shares):
    """Give every device as many micro-batches as the one with most: halve the largest, then add fillers."""
    count = max(map(len, shares))
    for share in shares:
        while len(share) < count and max(map(len, share), default=0) > 1:
            largest = max(range(len(share)), key=lambda i: len(share[i]))
            share[largest : largest + 1] = np.array_split(share[largest], 2)
        share.extend(np.empty(0, dtype=np.int64) for _ in range(count - len(share)))
    return shares


def token_batches(lengths, max_tokens: int) -> list[np.ndarray]:
    """Return batches of indices, longest sentences first, of at most `max_tokens` tokens with padding.

    For evaluation: nothing is dropped, so a longer sentence is a batch of its own. `lengths` is (N,) or (N, 2), where
    the limit holds for either side. Concatenated, the batches are the permutation that leads back to the first order.

    Example: lengths [3, 9, 4], max_tokens 10 -> [[1], [2, 0]]
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    longest = lengths.max(axis=1) if lengths.ndim == 2 else lengths
    order = np.argsort(-longest, kind="stable")
    batches, start = [], 0
    while start < len(order):
        rows = max(1, max_tokens // int(longest[order[start]]))
        batches.append(order[start : start + rows])
        start += rows
    return batches


def collate(pairs: Sequence[dict], pad_token_id: int, decoder_start_token_id: int) -> dict[str, torch.Tensor]:
    """Pad tokenised pairs into one batch; decoder inputs are the labels moved right behind the start token.

    Example, with <pad> 0, <s> 1, </s> 2:
        [{"input_ids": [5, 6, 2], "labels": [7, 2]}, {"input_ids": [8, 2], "labels": [9, 4, 2]}] ->
        input_ids         [[5, 6, 2], [8, 2, 0]]        attention_mask [[1, 1, 1], [1, 1, 0]]
        decoder_input_ids [[1, 7, 0], [1, 9, 4]]        labels         [[7, 2, -100], [9, 4, 2]]
    """
    input_ids, attention_mask = _pad([pair["input_ids"] for pair in pairs], pad_token_id)
    labels, label_mask = _pad([pair["labels"] for pair in pairs], -100)
    decoder_input_ids = torch.full_like(labels, decoder_start_token_id)
    decoder_input_ids[:, 1:] = labels[:, :-1]
    return {
        "input_ids": input_ids,
        "attention_mask": attention_mask.long(),
        "decoder_input_ids": decoder_input_ids.masked_fill_(~label_mask, pad_token_id),
        "labels": labels,
    }


def idle(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a pair of the batch from which nothing is learnt, for a device that only has to keep step with others."""
    pair = {name: tensor[:1] for name, tensor in batch.items()}
    return pair | {"labels": torch.full_like(pair["labels"], -100)}


def _pad(rows, fill):
    lengths = np.array([len(row) for row in rows])
    mask = np.arange(lengths.max()) < lengths[:, None]
    padded = np.full(mask.shape, fill, dtype=np.int64)
    padded[mask] = np.concatenate(rows)
    return torch.from_numpy(padded), torch.from_numpy(mask)
