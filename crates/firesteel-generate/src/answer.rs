use crate::{Message, MessageRole};

/// What ends a thought in the text of an answer.
const END_OF_THOUGHT: &str = "</think>";

impl Message {
    /// The message of the assistant that a generated text is: what comes before the first
    /// `</think>` is its reasoning, and the rest its content. A template that keeps the reasoning
    /// makes the same text of it again.
    pub fn answer(text: &str) -> Self {
        let Some((thought, content)) = text.split_once(END_OF_THOUGHT) else {
            return Self::text(MessageRole::Assistant, text);
        };
        // A prompt without the beginning of a thought leaves it to the model.
        let thought = thought.strip_prefix("<think>").unwrap_or(thought);
        let reasoning_content = Some(thought.to_owned()).filter(|thought| !thought.is_empty());
        Self { reasoning_content, ..Self::text(MessageRole::Assistant, content) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Content;

    #[test]
    fn a_thought_is_told_from_the_answer() {
        // (text, reasoning, content)
        let cases = [
            ("Yes.", None, "Yes."),
            ("is it?</think>Yes.", Some("is it?"), "Yes."),
            ("<think>is it?\n</think>\nYes.", Some("is it?\n"), "\nYes."),
            ("</think>Yes.", None, "Yes."),
            ("a</think>b</think>", Some("a"), "b</think>"),
            ("", None, ""),
        ];
        for (text, reasoning, content) in cases {
            let message = Message::answer(text);
            assert_eq!(message.role, MessageRole::Assistant);
            assert_eq!(message.reasoning_content.as_deref(), reasoning, "{text}");
            assert_eq!(message.content, Some(Content::Text(content.into())), "{text}");
        }
    }
}
