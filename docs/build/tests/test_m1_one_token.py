import torch
import torch.nn.functional as F
from built.attention import attend_one


def test_a_token_that_sees_only_itself_gets_its_value():
    out = attend_one(torch.randn(2, 4), torch.randn(1, 1, 4), torch.tensor([[[1.0, 2.0, 3.0, 4.0]]]))
    assert out.tolist() == [[1.0, 2.0, 3.0, 4.0]] * 2


def test_a_token_gets_more_of_the_values_whose_keys_match():
    keys = torch.tensor([[[1.0, 0.0, 0.0, 0.0]], [[0.0, 1.0, 0.0, 0.0]]])
    values = torch.tensor([[[10.0, 0.0, 0.0, 0.0]], [[0.0, 10.0, 0.0, 0.0]]])
    out = attend_one(torch.tensor([[2.0, 0.0, 0.0, 0.0]]), keys, values)
    weight = torch.tensor(1.0).exp() / (torch.tensor(1.0).exp() + 1)  # the scores are 2 / sqrt(4) and 0
    torch.testing.assert_close(out, torch.tensor([[10 * weight, 10 * (1 - weight), 0.0, 0.0]]))


def test_query_heads_share_kv_heads():
    q, keys, values = torch.randn(6, 8), torch.randn(5, 2, 8), torch.randn(5, 2, 8)
    tensors = q[None, :, None], keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
    expected = F.scaled_dot_product_attention(*tensors, enable_gqa=True)[0, :, 0]
    torch.testing.assert_close(attend_one(q, keys, values), expected)
