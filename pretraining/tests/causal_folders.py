"""What tests of folders ask of every causal model of Hugging Face's that is read here and goes back."""

import torch
from torch.nn.functional import cross_entropy


def assert_equal_and_goes_back(their_model, read, write, folder, *, rtol=1e-5, atol=1e-5):
    """Logits and gradients of the model saved in folder/theirs are theirs, and what is written is what it was."""
    ours = read(folder / "theirs")
    tokens = torch.randint(0, 37, (3, 12))
    expected = their_model(tokens, labels=tokens)
    logits = ours(tokens)
    torch.testing.assert_close(logits, expected.logits, rtol=rtol, atol=atol)
    expected.loss.backward()
    cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    write(ours, folder / "ours")
    repeated, told = type(their_model).from_pretrained(folder / "ours", output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    for (name, one), other in zip(their_model.named_parameters(), repeated.parameters(), strict=True):
        assert torch.equal(one, other), name
    torch.testing.assert_close(repeated.eval()(tokens).logits, expected.logits)
    with torch.no_grad():  # the gradients under their names, by writing a model whose weights are its gradients
        for parameter in list(ours.parameters()):
            parameter.copy_(parameter.grad)
    write(ours, folder / "gradients")
    gradients = dict(type(their_model).from_pretrained(folder / "gradients").named_parameters())
    for name, parameter in their_model.named_parameters():
        torch.testing.assert_close(gradients[name].detach(), parameter.grad, rtol=10 * rtol, atol=atol, msg=name)


def assert_several_files_are_read(their_model, read, folder):
    """The model that is saved in folder/one is read from as many files as it is cut into."""
    their_model.save_pretrained(folder / "several", max_shard_size="8KB")
    assert len(list((folder / "several").glob("model-*.safetensors"))) > 1
    tokens = torch.randint(0, 37, (2, 9))
    assert torch.equal(read(folder / "several")(tokens), read(folder / "one")(tokens))
