use serde_json::{Value, json};

/// How a text is cut into words before the merges, as tokenizer.json says it in steps and a GGUF
/// file by a name.
#[derive(Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PreTokenizer {
    /// `tokenizer.ggml.pre` of a GGUF file.
    pub name: &'static str,
    /// Whether the text is made NFC first. llama.cpp does not do so, and makes other tokens than
    /// the published tokenizer of a text that is not in NFC.
    pub nfc: bool,
    /// The patterns to split at, one after the other; what they match is a word.
    pub splits: &'static [&'static str],
    /// Whether each digit is a word then. Bytes follow.
    pub single_digits: bool,
}

static PRE_TOKENIZERS: [PreTokenizer; 2] = [
    PreTokenizer {
        name: "spark2_5",
        nfc: false,
        splits: &[
            r"\p{N}{1,3}",
            "[一-龥぀-ゟ゠-ヿ]+",
            concat!(
                r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|"##,
                "[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+|",
                r" ?[\p{P}\p{S}]+|",
                "[\r\n]|",
                r"\s+(?!\S)|\s+",
            ),
        ],
        single_digits: true,
    },
    PreTokenizer {
        name: "qwen2",
        nfc: true,
        splits: &[concat!(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|",
            r"\s*[\r\n]+|\s+(?!\S)|\s+",
        )],
        single_digits: false,
    },
];

impl PreTokenizer {
    /// What to do about a name that [`of`](Self::of) does not know.
    pub const KNOWN: &'static str = "only \"spark2_5\" and \"qwen2\" are known; use a folder with \
                                     the tokenizer.json of the model";

    /// The one that GGUF files call `name`.
    pub fn of(name: &str) -> Option<&'static Self> {
        PRE_TOKENIZERS.iter().find(|known| known.name == name)
    }

    /// The one that tokenizer.json describes by its `pre_tokenizer`.
    pub(crate) fn of_json(pre_tokenizer: &Value) -> Option<&'static Self> {
        let steps = without_offsets(pre_tokenizer);
        PRE_TOKENIZERS.iter().find(|known| known.steps() == steps)
    }

    /// Whether its `normalizer` in tokenizer.json is `normalizer`.
    pub(crate) fn goes_with(&self, normalizer: &Value) -> bool {
        normalizes(normalizer) == Some(self.nfc)
    }

    /// `pre_tokenizer` of tokenizer.json, without the key that only changes where tokens are said
    /// to be in the text.
    fn steps(&self) -> Value {
        let split = |regex: &&str| {
            json!({
                "type": "Split",
                "pattern": {"Regex": regex},
                "behavior": "Isolated",
                "invert": false,
            })
        };
        let digits = json!({"type": "Digits", "individual_digits": true});
        let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "use_regex": false});
        let splits = self.splits.iter().map(split);
        let steps = splits.chain(self.single_digits.then_some(digits)).chain([bytes]);
        json!({"type": "Sequence", "pretokenizers": steps.collect::<Vec<_>>()})
    }
}

/// Whether a normalizer makes a text NFC; `None` where it does anything else.
fn normalizes(normalizer: &Value) -> Option<bool> {
    if normalizer.is_null() {
        return Some(false);
    }
    match normalizer.get("normalizers").and_then(Value::as_array).map(Vec::as_slice) {
        Some([]) => Some(false),
        Some([only]) => normalizes(only),
        Some(_) => None,
        None => (normalizer == &json!({"type": "NFC"})).then_some(true),
    }
}

fn without_offsets(pre_tokenizer: &Value) -> Value {
    let mut value = pre_tokenizer.clone();
    let steps = value.get_mut("pretokenizers").and_then(Value::as_array_mut);
    for step in steps.into_iter().flatten().filter_map(Value::as_object_mut) {
        step.remove("trim_offsets");
    }
    value
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokenizer_json_is_known_by_its_steps() {
        for known in &PRE_TOKENIZERS {
            assert!(PreTokenizer::KNOWN.contains(&format!("{:?}", known.name)));
            assert_eq!(PreTokenizer::of(known.name), Some(known));
            let nfc = json!({"type": "NFC"});
            let (normalizer, other) =
                if known.nfc { (nfc, Value::Null) } else { (Value::Null, nfc) };
            let mut steps = known.steps();
            assert_eq!(PreTokenizer::of_json(&steps), Some(known));
            assert!(known.goes_with(&normalizer) && !known.goes_with(&other));
            let last = steps["pretokenizers"].as_array_mut().unwrap().last_mut().unwrap();
            last["trim_offsets"] = false.into();
            let list = json!({"type": "Sequence", "normalizers": [normalizer]});
            let list = if known.nfc { list } else { json!({"normalizers": []}) };
            assert!(known.goes_with(&list));
            assert_eq!(PreTokenizer::of_json(&steps), Some(known));
            steps["pretokenizers"][0]["invert"] = true.into();
            assert_eq!(PreTokenizer::of_json(&steps), None);
        }
        assert_eq!(PreTokenizer::of("llama-bpe"), None);
    }
}
