"""Part 5 of "next" and what its lab prints: characters and byte pairs of one sentence, and their tables."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accounting import flops, pairs, params
from accounting import huggingface as configs
from accounting.authorities import huggingface as modules
from accounting.authorities import torch_counter
from accounting.census import Part
from accounting.ledger import case
from model import tokens
from model.recipes import tutor
from model.torch_decoder import Decoder
from tests.toys import FEW

SENTENCE = "To be, or not to be, that is the question."
WIDTH = 768
CHARACTERS, PAIRS = 65, 50257  # symbols of tiny Shakespeare, and of GPT-2
SHAKESPEARE = "text/tinyshakespeare.txt"
#: Sums of a few dozen float64 terms in another order: 4,500 roundings of 2.2e-16.
ROUNDING = 1e-12


def lengths():
    """Tokens of the sentence, in characters and in byte pairs."""
    return len(tokens.characters(SENTENCE).encode(SENTENCE)), len(tokens.gpt2().encode(SENTENCE))


def config(vocab):
    sizes = {"n_embd": WIDTH, "n_head": 12, "n_layer": 1, "n_positions": 64}
    return {"model_type": "gpt2", "vocab_size": vocab, **sizes}


def table(vocab):
    """Numbers in the token table of a decoder 768 wide, counted and built."""
    spec = configs.read(config(vocab)).spec
    return params.by_part(spec)[Part.EMBEDDING].unique, modules.build(config(vocab)).transformer.wte.weight.numel()


@pytest.mark.claim("next.part5.char_tokens")
def test_characters_of_the_sentence(claim):
    """The sentence has a token for each of its 42 characters."""
    claim.measured(lengths()[0], observed=len(SENTENCE))


@pytest.mark.claim("next.part5.bpe_tokens")
def test_pairs_of_the_sentence(claim):
    """GPT-2's encoding makes 13 tokens of it, each with bytes of its own."""
    encoding = tokens.gpt2()
    pieces = [encoding.decode_single_token_bytes(token) for token in encoding.encode(SENTENCE)]
    assert b"".join(pieces) == SENTENCE.encode()
    claim.measured(lengths()[1], observed=len(pieces))


@pytest.mark.claim("next.part5.char_vocab")
def test_vocabulary_of_shakespeare(claim):
    """Tiny Shakespeare has 65 distinct characters, those of the sentence among them."""
    text = claim.data(SHAKESPEARE).read_text()
    tokenizer = tokens.characters(text)
    assert set(SENTENCE) < set(tokenizer.vocabulary)
    claim.measured(len(tokenizer), observed=len(set(text)))


@pytest.mark.claim("next.part5.bpe_vocab")
def test_vocabulary_of_gpt2(claim):
    """GPT-2 has 50,257 tokens: 256 bytes, 50,000 merges and the end of a text."""
    encoding = tokens.gpt2()
    ranks, special = encoding._mergeable_ranks, encoding.special_tokens_set
    claim.measured(encoding.n_vocab, observed=len(ranks) + len(special))
    single = sum(len(piece) == 1 for piece in ranks)
    claim.holds((single, len(ranks) - single, len(special)) == (256, 50_000, 1), f"{single} bytes, {len(special)} end")


@pytest.mark.parametrize("vocab", [case("next.part5.char_table", CHARACTERS), case("next.part5.bpe_table", PAIRS)])
def test_tables(claim, vocab):
    """A table has a row of 768 for each symbol."""
    predicted, built = table(vocab)
    claim.measured(predicted, observed=built)


@pytest.mark.claim("next.part5.roundtrip")
def test_both_encodings_decode_to_the_text(claim):
    """Both give back the sentence, and any text of what they know: byte pairs know every one."""
    characters, encoding = tokens.characters(SENTENCE), tokens.gpt2()

    @given(st.text(characters.vocabulary), st.text())
    def everywhere(known, text):
        assert characters.decode(characters.encode(known)) == known
        assert encoding.decode(encoding.encode(text, disallowed_special=())) == text

    everywhere()
    decoded = {each.decode(each.encode(SENTENCE)) for each in (characters, encoding)}
    claim.holds(decoded == {SENTENCE}, f"{decoded}")


@pytest.mark.claim("next.part5.tradeoff")
def test_shorter_and_larger(claim):
    """Byte pairs make fewer tokens and a larger table."""
    long, short = lengths()
    (small, built_small), (large, built_large) = table(CHARACTERS), table(PAIRS)
    assert (small, large) == (built_small, built_large)
    claim.holds(
        short < long and small < large,
        f"{short} tokens for {long}, {large:,} numbers for {small:,}: {large / small:.0f} times the table",
    )


@pytest.mark.claim("next.part5.shorter_less_attention")
def test_fewer_tokens_are_less_attention(claim):
    """Of the same text the attention of 13 tokens is (13/42)^2 of that of 42, with the mask 13 x 14 of 42 x 43."""

    def attention(seq):
        module, ids = modules.build(config(PAIRS), attn_implementation="eager"), torch.zeros(1, seq, dtype=torch.long)
        counted = torch_counter.by_operator(
            lambda: module(ids.to("meta"), attention_mask=torch.ones_like(ids).to("meta"))
        )
        spec = configs.read(config(PAIRS)).spec
        full, masked = (flops.forward(spec, seq=seq, pairs=rule) for rule in (pairs.full, pairs.causal))
        assert full.scores + full.mixture == counted["aten.bmm"]
        return counted["aten.bmm"], masked.scores + masked.mixture

    long, short = lengths()
    full, masked = (Fraction(few, many) for few, many in zip(attention(short), attention(long), strict=True))
    claim.holds(
        full == Fraction(short, long) ** 2 and masked == Fraction(short * (short + 1), long * (long + 1)),
        f"{float(full):.3f} of all pairs, {float(masked):.3f} of the mask's",
    )


@pytest.mark.claim("next.part5.rows_tied_to_ids")
def test_rows_belong_to_ids(claim):
    """Other ids for the same text change what a decoder says of it, unless its rows move with them."""
    torch.manual_seed(0)
    vocab = 9

    def renamed(order, text):
        """How far other ids move the logits of the same symbols, before and after the rows have moved too."""
        decoder, ids, order = Decoder(tutor(vocab=vocab)).double(), torch.tensor([text]), torch.tensor(order)
        before = decoder(ids)
        gaps = [(decoder(order[ids])[..., order] - before).abs().max().item()]
        with torch.no_grad():
            decoder.embedding.weight[order] = decoder.embedding.weight.clone()
        return *gaps, (decoder(order[ids])[..., order] - before).abs().max().item()

    @FEW
    @given(st.permutations(range(vocab)), st.lists(st.integers(0, vocab - 1), min_size=1, max_size=6))
    def everywhere(order, text):
        alone, together = renamed(order, text)
        assert together < ROUNDING
        assert alone > 1e3 * ROUNDING or order == list(range(vocab))

    everywhere()
    alone, together = renamed([1, 0, *range(2, vocab)], [0, 1, 2])
    claim.holds(
        together < ROUNDING and alone > 1e3 * ROUNDING,
        f"two ids exchanged: logits move by {alone:.2g}, and by {together:.0e} where the rows do",
    )


@pytest.mark.claim("next.out.p5_char")
def test_printed_characters(claim):
    """The lab's line on characters: the symbols of its text, and the tokens of the sentence."""
    tokenizer = tokens.characters(claim.data(SHAKESPEARE).read_text())
    claim.measured([len(tokenizer), len(tokenizer.encode(SENTENCE))])


@pytest.mark.claim("next.out.p5_bpe")
def test_printed_pairs(claim):
    """The lab's line on byte pairs: the symbols of GPT-2, and the tokens of the sentence."""
    encoding = tokens.gpt2()
    claim.measured([encoding.n_vocab, len(encoding.encode(SENTENCE))])


@pytest.mark.claim("next.out.p5_tables")
def test_printed_tables(claim):
    """The lab's line on tables at width 768."""
    predicted, built = zip(table(CHARACTERS), table(PAIRS), strict=True)
    claim.measured(predicted, observed=built)
